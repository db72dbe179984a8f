"""Can the layers of a model be cut into the virtual stages of a layout? No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def stage_problems(
    num_layers: int, pp: int, chunks: int, split: Sequence[int] | None
) -> Iterator[str]:
    """Why `pp * chunks` virtual stages, in model order with `split` layers each, are impossible.

    Without a split every one of them needs a layer. With one, the first (the embedding) and the
    last (the head) may have none.
    """
    count, sizes = pp * chunks, f"parallel.pp={pp} x parallel.chunks={chunks}"
    if split is None:
        if num_layers < count:
            most = num_layers // chunks
            advice = f"pp can be 1 to {most}" if most else f"chunks can be 1 to {num_layers}"
            yield (
                f"model.num_layers={num_layers} is fewer than the {count} virtual stages of "
                f"{sizes}; {advice}, or give parallel.split"
            )
        return
    shown = f"parallel.split=[{','.join(map(str, split))}]"
    if len(split) != count:
        yield f"{shown} has {len(split)} entries; it needs one per virtual stage, {sizes} = {count}"
    if sum(split) != num_layers or any(layers < 0 for layers in split):
        yield f"{shown} places {sum(split)} layers; model.num_layers={num_layers}, each placed once"
    if 0 in split[1:-1]:
        yield (
            f"{shown} leaves an inner virtual stage without layers; only the first and the last "
            f"can be"
        )
