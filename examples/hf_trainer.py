"""Hugging Face's Trainer with one changed line: the same training, and the passes over memory that are gone.

Trains a small Llama on the help texts of Python twice, stock and with `fuse_trainer`, and counts PyTorch's calls.
Needs transformers 5 and accelerate; downloads nothing. `python examples/hf_trainer.py`
"""

from __future__ import annotations

import tempfile
from collections import Counter

import torch
from text_data import IGNORED, VOCABULARY, paragraphs
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.profiler import profile
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

from accumfused.integrations.huggingface import fuse_trainer

LONGEST_SAMPLE = 64
UPDATES = 5
PASSES = {  # over all gradients, or over all parameters
    "aten::add_": "autograd adds the micro-batches (and much else, in small)",
    "aten::linalg_vector_norm": "clipping: the norm of each gradient",
    "aten::_foreach_mul_": "clipping: gradients times the coefficient",
    "aten::_fused_adamw_": "torch's step",
}


def collate(samples: list[Tensor]) -> dict[str, Tensor]:
    """A padded batch; Transformers shifts the labels itself."""
    labels = pad_sequence(samples, batch_first=True, padding_value=IGNORED)
    return {"input_ids": labels.clamp(min=0), "attention_mask": (labels != IGNORED).long(), "labels": labels}


def trainer(folder: str) -> Trainer:
    """The stock Trainer: 4 micro-batches of 4 samples an update, of different numbers of tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        max_steps=UPDATES,
        learning_rate=1e-3,
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        log_level="error",
    )
    samples = [sample for sample in paragraphs(LONGEST_SAMPLE) if len(sample) > 1]
    return Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=samples, data_collator=collate)


def train(trainer: Trainer) -> Counter[str]:
    """Trains, and counts the calls."""
    trainer.remove_callback(PrinterCallback)
    with profile() as calls:
        trainer.train()
    return Counter(event.name for event in calls.events())


with tempfile.TemporaryDirectory() as folder:
    stock = trainer(folder)
    fused = fuse_trainer(trainer(folder))  # the changed line
    counts = [train(stock), train(fused)]

print(f"{'update':>6}  {'loss, stock':>12}  {'accumfused':>12}  {'norm, stock':>12}  {'accumfused':>12}")
for theirs, ours in zip(stock.state.log_history[:UPDATES], fused.state.log_history, strict=False):
    print(
        f"{theirs['step']:6}  {theirs['loss']:12.6f}  {ours['loss']:12.6f}"
        f"  {theirs['grad_norm']:12.6f}  {ours['grad_norm']:12.6f}"
    )
pairs = zip(stock.model.parameters(), fused.model.parameters(), strict=True)
print(f"largest difference between parameters: {max(float((a - b).detach().abs().max()) for a, b in pairs):.1e}\n")

parameters = len(list(stock.model.parameters()))
print(f"calls in {UPDATES} updates of {parameters} tensors: stock, accumfused")
for name, what in PASSES.items():
    print(f"{name:>26} {counts[0][name]:5} {counts[1][name]:5}  {what}")
