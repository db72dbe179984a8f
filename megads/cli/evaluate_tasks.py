"""`megads-eval --tasks`: tasks of the lm-evaluation-harness."""

from __future__ import annotations

import argparse
import json

BATCH = 8
"""Texts in a batch where the command line does not say."""


def tasks(options: argparse.Namespace) -> tuple[str, str]:
    """Run the tasks, or list them; the result for programs and for people."""
    from megads.checkpoint.directory import find_checkpoint
    from megads.cli.devices import chosen_device, chosen_dtype
    from megads.extras import load_extra
    from megads.train.load import load_model, run_tokenizer

    load_extra("lm_eval", "--tasks")
    from megads.train.harness import (
        HarnessModel,
        TaskRequest,
        list_tasks,
        run_tasks,
        table,
        to_json,
    )

    if options.tasks == ["list"]:
        listed = list_tasks(options.include_path)
        return json.dumps(listed), listed
    checkpoint = find_checkpoint(options.run)
    device = chosen_device(options.device)
    model = HarnessModel(
        load_model(checkpoint, device=device, dtype=chosen_dtype(options.dtype)),
        run_tokenizer(checkpoint, options.tokenizer),
        batch_size=options.batch or BATCH,
        device=device,
        bos=options.bos_id,
        name=str(checkpoint),
    )
    request = TaskRequest(
        options.tasks,
        options.include_path,
        options.num_fewshot,
        options.limit,
        options.gen_kwargs,
    )
    results = run_tasks(model, request)
    return to_json(results), f"{checkpoint}\n{table(results)}"
