"""Do loops that people run end where they end with torch.optim? Each trains twice, on the same data from the same seed.

Compared is how far the weights are apart, as a share of the way from their beginning. Two right optimizers differ in
the last bits of fp32: on a CPU some 1e-6 of the way. In 16 bits a number may then be rounded to another neighbour, at
2^-11 or 2^-8 of it. A learning rate that is 1% off is 1e-2, a forgotten clip more than 1: AdamW's eps is as large as a
gradient, so that it does not divide a wrong scale out again.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader

import accumfused as af
from bench.gpu.card import DRY, run

DEVICE = torch.device("cpu" if DRY else "cuda:0")
FEATURES, WIDTH = (8, 16) if DRY else (64, 1024)
SAMPLES, K, UPDATES = 8, 4, 12  # of a micro-batch, micro-batches of a window
LR, EPS, DECAY, CLIP = 0.02, 0.1, 0.01, 0.1
FP32, IN_16_BITS = 1e-4, 3e-3  # of the way, at most


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = (FEATURES, WIDTH, WIDTH, 3)
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(sizes))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(F.gelu(x))
        return {"loss": F.cross_entropy(x.float(), labels)}


def samples() -> list[dict[str, Tensor]]:
    inputs = torch.randn(SAMPLES * K * UPDATES, FEATURES, generator=torch.Generator().manual_seed(1))
    return [{"x": x, "labels": x[:3].argmax()} for x in inputs]


def optimizer_of(net: nn.Module, ours: bool, **options: Any) -> Any:
    if ours:
        return af.AdamW(net.parameters(), LR, eps=EPS, weight_decay=DECAY, max_grad_norm=CLIP, **options)
    return torch.optim.AdamW(net.parameters(), LR, eps=EPS, weight_decay=DECAY)


# ---- a loop trains a network, with our optimizer or with torch's -----------------------------------------------------


def trainer(net: Net, ours: bool, precision: str) -> None:
    from transformers import PrinterCallback, Trainer, TrainingArguments

    from accumfused.integrations.huggingface import fuse_trainer

    forget_precision()
    loop = {"per_device_train_batch_size": SAMPLES, "gradient_accumulation_steps": K, "max_steps": UPDATES}
    adamw = {"learning_rate": LR, "adam_epsilon": EPS, "weight_decay": DECAY, "lr_scheduler_type": "constant"}
    quiet = {"save_strategy": "no", "logging_strategy": "no", "report_to": [], "disable_tqdm": True}
    arguments = TrainingArguments(max_grad_norm=CLIP, use_cpu=DRY, **{precision: True}, **loop, **adamw, **quiet)
    made = Trainer(model=net, args=arguments, train_dataset=samples())
    made.remove_callback(PrinterCallback)
    (fuse_trainer(made) if ours else made).train()


def accelerate(net: Net, ours: bool) -> None:
    from accelerate import Accelerator

    forget_precision()
    # A CPU has no fp16 there.
    accelerator = Accelerator(cpu=DRY, mixed_precision="bf16" if DRY else "fp16", gradient_accumulation_steps=K)
    loader = DataLoader(samples(), batch_size=SAMPLES)
    model, optimizer, loader = accelerator.prepare(net, optimizer_of(net, ours), loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            if ours:
                optimizer.optimizer.accumulate(last=accelerator.sync_gradients)
            elif accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()


def forget_precision() -> None:
    """All Accelerators of a process, Trainer's too, have the first one's."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def lightning(net: Net, ours: bool) -> None:
    from lightning import LightningModule, Trainer
    from lightning.pytorch.plugins.precision import MixedPrecision

    from accumfused.integrations.lightning import FusedAccumulation

    class Stock(LightningModule):
        def configure_optimizers(self) -> Any:
            return optimizer_of(net, ours)

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self.net(**batch)["loss"]

    class Ours(FusedAccumulation, Stock):
        pass

    module = Ours() if ours else Stock()
    module.net = net
    precision = MixedPrecision("16-mixed", DEVICE.type, scaler=torch.amp.GradScaler(DEVICE.type))
    quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    loop = {"max_epochs": 1, "accumulate_grad_batches": K, "gradient_clip_val": None if ours else CLIP}
    fits = Trainer(accelerator="cpu" if DRY else "gpu", devices=1, plugins=precision, **loop, **quiet)
    fits.fit(module, DataLoader(samples(), batch_size=SAMPLES))


def by_hand(net: Net, ours: bool, how: str) -> None:
    """Args: how: torch.compile, or the way of one process."""
    if how == "compile":
        net.compile(backend="aot_eager" if DRY else "inductor")
    elif not dist.is_initialized():
        dist.init_process_group("gloo" if DRY else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    model: Any = nn.parallel.DistributedDataParallel(net) if how == "attach_ddp" else net
    if how == "fully_shard":
        for module in (*net.layers, net):
            fully_shard(module)
    options = {"process_group": dist.group.WORLD} if ours and how == "process_group" else {}
    optimizer = optimizer_of(net, ours, **options)
    if ours and how == "attach_ddp":
        af.attach_ddp(model, optimizer)
    for batch, last in af.windows(DataLoader(samples(), batch_size=SAMPLES), K):
        if how == "fully_shard":
            model.set_requires_gradient_sync(last)
        loss = model(**{name: value.to(DEVICE) for name, value in batch.items()})["loss"]
        if not ours:
            (loss / K).backward()
        elif how == "fully_shard":
            optimizer.backward(loss, weight=SAMPLES)
        else:
            loss.backward()
            optimizer.accumulate(weight=SAMPLES)
        if last:
            if not ours:
                nn.utils.clip_grad_norm_(net.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()


# ---- both, compared --------------------------------------------------------------------------------------------------


def compare(name: str, limit: float, loop: Callable[[Net, bool], None]) -> None:
    """Prints a line.

    Raises:
        RuntimeError: the weights are further apart than the limit.
    """
    ends, seconds = [], []
    for ours in (False, True):
        torch.manual_seed(0)
        net = Net().to(DEVICE)
        begin, start = weights(net), time.perf_counter()
        loop(net, ours)
        ends.append(weights(net))
        seconds.append(time.perf_counter() - start)
    apart = float((ends[1] - ends[0]).norm() / (ends[0] - begin).norm())
    print(f"{name}: {apart:.1e} of the way apart (at most {limit:g}), {seconds[1]:.2f} s, stock {seconds[0]:.2f} s")
    if not apart <= limit:
        raise RuntimeError("it ends elsewhere than with torch.optim")


def weights(net: nn.Module) -> Tensor:
    whole = [param.full_tensor() if hasattr(param, "full_tensor") else param for param in net.parameters()]
    return torch.cat([param.detach().double().cpu().flatten() for param in whole])


LOOPS = {  # name -> package, limit, loop
    "Trainer, bf16": ("transformers", IN_16_BITS, partial(trainer, precision="bf16")),
    "Trainer, fp16": ("transformers", IN_16_BITS, partial(trainer, precision="fp16")),
    "Accelerate, fp16": ("accelerate", IN_16_BITS, accelerate),
    "Lightning, 16-mixed": ("lightning", IN_16_BITS, lightning),
    "torch.compile": ("torch", FP32, partial(by_hand, how="compile")),
    "attach_ddp, one process": ("torch", FP32, partial(by_hand, how="attach_ddp")),
    "process_group=, one process": ("torch", FP32, partial(by_hand, how="process_group")),
    "fully_shard, one process": ("torch", FP32, partial(by_hand, how="fully_shard")),
}

if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    missing = [name for name, (package, *_) in LOOPS.items() if importlib.util.find_spec(package) is None]
    for name in missing:
        print(f"left out: {name} ({LOOPS[name][0]} is not installed)")
    there = {name: partial(compare, name, *rest) for name, (_, *rest) in LOOPS.items() if name not in missing}
    status = run(there)
    print(f"{len(there)} loops, {len(missing)} left out")
    sys.exit(status)
