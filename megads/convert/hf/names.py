"""Where Hugging Face models keep each canonical tensor: names, orders and shapes. Pure: no torch.

A canonical tensor is stored as one tensor, or as several that lie one below the other in it (q, k
and v; gate and up).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from megads.models.families import HEAD
from megads.parallel.sharding import ParamSpec

Order = Literal["plain", "transposed", "grouped", "offset"]
"""`transposed`: `[in, out]` (GPT-2's Conv1D). `grouped`: q, k, v of one head after the other.
`offset`: positions begin at row 2 (OPT)."""
OFFSET = 2
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """The tensors that make up a canonical one, and the order of their elements."""

    names: tuple[str, ...]
    order: Order = "plain"

    def shapes(self, spec: ParamSpec) -> tuple[Shape, ...]:
        """Of the tensors in the files, for a canonical tensor of this spec."""
        if len(self.names) > 1:
            return tuple((part.size, *spec.shape[1:]) for part in spec.parts)
        if self.order == "transposed":
            return (spec.shape[::-1],)
        if self.order == "offset":
            return ((spec.shape[0] + OFFSET, *spec.shape[1:]),)
        return (spec.shape,)


@dataclass(frozen=True)
class NameTable:
    """Names of one architecture's modules, by those of ours.

    `prefix`: of everything but the head; files of the bare model lack it. `layers`: the list of
    blocks. `outer`, `block`: modules outside and inside of blocks. `orders`: of the modules in
    `block` or `outer` that are not plain. `head`: module names, the first is the one to write.
    `buffers`, `block_buffers`: computed tensors that old files hold as well.
    """

    prefix: str
    layers: str
    outer: Mapping[str, str]
    block: Mapping[str, tuple[str, ...]]
    orders: Mapping[str, Order] = field(default_factory=dict)
    head: tuple[str, ...] = ("lm_head",)
    buffers: frozenset[str] = frozenset()
    block_buffers: frozenset[str] = frozenset()

    def stored(self, name: str) -> Stored:
        """How the canonical tensor `name` is stored, with full names."""
        if name == HEAD:
            return Stored((f"{self.head[0]}.weight",))
        module, _, kind = name.rpartition(".")
        if module.startswith("blocks."):
            _, layer, module = module.split(".", 2)
            modules = tuple(f"{self.layers}.{layer}.{m}" for m in self.block[module])
        else:
            modules = (self.outer[module],)
        order = self.orders.get(module, "plain")
        if order == "transposed" and kind == "bias":
            order = "plain"
        return Stored(tuple(f"{self.prefix}{m}.{kind}" for m in modules), order)

    def full_name(self, name: str) -> str:
        """A name in a file as `stored` spells it: with the prefix, the head under its own name."""
        module, _, kind = name.rpartition(".")
        if module in self.head:
            return f"{self.head[0]}.{kind}"
        return name if name.startswith(self.prefix) else self.prefix + name

    def is_buffer(self, full_name: str) -> bool:
        """Whether a tensor is computed, not learned."""
        inner = full_name.removeprefix(self.prefix)
        if inner in self.buffers:
            return True
        number, _, rest = inner.removeprefix(f"{self.layers}.").partition(".")
        return number.isdecimal() and rest in self.block_buffers


GPT2 = NameTable(
    prefix="transformer.",
    layers="h",
    outer={"embedding.word": "wte", "embedding.position": "wpe", "final_norm": "ln_f"},
    block={
        "attn_norm": ("ln_1",),
        "attn.qkv": ("attn.c_attn",),
        "attn.out": ("attn.c_proj",),
        "mlp_norm": ("ln_2",),
        "mlp.up": ("mlp.c_fc",),
        "mlp.down": ("mlp.c_proj",),
    },
    orders={
        "attn.qkv": "transposed",
        "attn.out": "transposed",
        "mlp.up": "transposed",
        "mlp.down": "transposed",
    },
    block_buffers=frozenset({"attn.bias", "attn.masked_bias"}),
)
OPT = NameTable(
    prefix="model.",
    layers="decoder.layers",
    outer={
        "embedding.word": "decoder.embed_tokens",
        "embedding.position": "decoder.embed_positions",
        "final_norm": "decoder.final_layer_norm",
    },
    block={
        "attn_norm": ("self_attn_layer_norm",),
        "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attn.out": ("self_attn.out_proj",),
        "mlp_norm": ("final_layer_norm",),
        "mlp.up": ("fc1",),
        "mlp.down": ("fc2",),
    },
    orders={"embedding.position": "offset"},
)
BLOOM = NameTable(
    prefix="transformer.",
    layers="h",
    outer={
        "embedding.word": "word_embeddings",
        "embedding.norm": "word_embeddings_layernorm",
        "final_norm": "ln_f",
    },
    block={
        "attn_norm": ("input_layernorm",),
        "attn.qkv": ("self_attention.query_key_value",),
        "attn.out": ("self_attention.dense",),
        "mlp_norm": ("post_attention_layernorm",),
        "mlp.up": ("mlp.dense_h_to_4h",),
        "mlp.down": ("mlp.dense_4h_to_h",),
    },
    orders={"attn.qkv": "grouped"},
)
GPT_NEOX = NameTable(
    prefix="gpt_neox.",
    layers="layers",
    outer={"embedding.word": "embed_in", "final_norm": "final_layer_norm"},
    block={
        "attn_norm": ("input_layernorm",),
        "attn.qkv": ("attention.query_key_value",),
        "attn.out": ("attention.dense",),
        "mlp_norm": ("post_attention_layernorm",),
        "mlp.up": ("mlp.dense_h_to_4h",),
        "mlp.down": ("mlp.dense_4h_to_h",),
    },
    orders={"attn.qkv": "grouped"},
    head=("embed_out", "lm_head"),
    buffers=frozenset({"rotary_emb.inv_freq"}),
    block_buffers=frozenset(
        {"attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq"}
    ),
)
LLAMA = NameTable(
    prefix="model.",
    layers="layers",
    outer={"embedding.word": "embed_tokens", "final_norm": "norm"},
    block={
        "attn_norm": ("input_layernorm",),
        "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attn.q_norm": ("self_attn.q_norm",),
        "attn.k_norm": ("self_attn.k_norm",),
        "attn.out": ("self_attn.o_proj",),
        "mlp_norm": ("post_attention_layernorm",),
        "mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down": ("mlp.down_proj",),
    },
    buffers=frozenset({"rotary_emb.inv_freq"}),
    block_buffers=frozenset({"self_attn.rotary_emb.inv_freq"}),
)
"""Also of Mistral, Qwen2 and Qwen3."""
