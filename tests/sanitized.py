"""Every CUDA kernel once, for compute-sanitizer: aligned and ragged memory, 16-bit gradients, each rule and format."""

from __future__ import annotations

import torch

import accumfused as af

for optimizer_class, options in (
    (af.AdamW, {}), (af.AdamW, {"amsgrad": True}), (af.SGD, {}), (af.SGD, {"momentum": 0.9}), (af.Lion, {})
):  # fmt: skip
    memory = [torch.randn(n + 1, device="cuda") for n in (3 * 32768 + 5, 1023, 16, 1)]
    params = [m[index % 2 :].requires_grad_() for index, m in enumerate(memory)]
    optimizer = optimizer_class(params, max_grad_norm=1.0, backend="cuda", **options)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for weight in (1.0, 2.0):
            for param in params:
                param.grad_dtype = dtype
                param.grad = torch.randn(param.numel(), device="cuda").to(dtype)
            optimizer.accumulate(weight)
        optimizer.step()
    torch.cuda.synchronize()
    print("stepped", optimizer_class.__name__, int(optimizer.skipped_steps))

FORMATS = [
    {"master_weights": masters, "state_dtype": states}
    for masters in ("split8", "split16")
    for states in ("int8", torch.bfloat16)
]
FORMATS += [{"master_weights": None, "state_dtype": "int8"}]
for optimizer_class, options in ((af.AdamW, {}), (af.AdamW, {"amsgrad": True}), (af.Lion, {})):
    for formats in FORMATS if "amsgrad" not in options else FORMATS[1::2]:  # which 8-bit states do not serve
        params = [torch.randn(n, device="cuda").bfloat16().requires_grad_() for n in (3 * 32768 + 2048 + 5, 1023, 1)]
        optimizer = optimizer_class(params, backend="cuda", state_dtype_min_numel=2, **options, **formats)
        for dtype in (torch.float32, torch.bfloat16):
            for weight in (1.0, 2.0):
                for param in params:
                    param.grad_dtype = dtype
                    param.grad = torch.randn(param.numel(), device="cuda").to(dtype)
                optimizer.accumulate(weight)
            optimizer.step()
        torch.cuda.synchronize()
        print("stepped", optimizer_class.__name__, formats)
