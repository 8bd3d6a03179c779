"""Every CUDA kernel once, for compute-sanitizer: aligned and ragged memory, 16-bit gradients, each rule and format."""

from __future__ import annotations

import itertools
from typing import Any

import torch

import accumfused as af

RULES: tuple[tuple[Any, dict[str, Any]], ...] = (
    (af.SGD, {}), (af.SGD, {"momentum": 0.9}), (af.Lion, {}), (af.AdamW, {}), (af.AdamW, {"amsgrad": True}),
)  # fmt: skip
FORMATS: list[dict[str, Any]] = [{"master_weights": None, "state_dtype": "int8"}]
FORMATS += [{"master_weights": m, "state_dtype": s} for m in ("split8", "split16") for s in ("int8", torch.bfloat16)]

for (optimizer_class, options), formats in itertools.product(RULES, [{}, *FORMATS]):
    if (formats and optimizer_class is af.SGD) or ("amsgrad" in options and formats.get("state_dtype") == "int8"):
        continue  # of SGD the formats' kernel is the others'; 8-bit states do not serve amsgrad
    dtype = torch.bfloat16 if formats else torch.float32
    memory = [torch.randn(n + 1, device="cuda").to(dtype) for n in (3 * 32768 + 2048 + 5, 1023, 16, 1)]
    params = [values[index % 2 :].requires_grad_() for index, values in enumerate(memory)]
    known = {"max_grad_norm": None if formats else 1.0, "state_dtype_min_numel": 2, "backend": "cuda"}
    optimizer = optimizer_class(params, **known, **options, **formats)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for weight in (1.0, 2.0):
            for param in params:
                param.grad_dtype = dtype
                param.grad = torch.randn(param.numel(), device="cuda").to(dtype)
            optimizer.accumulate(weight)
        optimizer.step()
    torch.cuda.synchronize()
    print("stepped", optimizer_class.__name__, options, formats, int(optimizer.skipped_steps))
