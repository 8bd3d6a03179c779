"""Draws a walk: the configuration, and calls with all their arguments. It depends on the seed alone."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

Call = tuple[str, dict[str, Any]]

SHAPES = ([3, 4], [5], [3, 4], [5], [17], [], [0], [3, 0], [1], [1, 6], [2, 3, 2, 2], [1, 2, 1, 3], [40, 30], [1025])
LAYOUTS = ("contiguous", "contiguous", "transposed", "channels_last", "holes", "offset")
OPTIONS = {
    "sgd": ({}, {"momentum": 0.6}, {"momentum": 0.6, "nesterov": True, "weight_decay": 0.2},
            {"momentum": 0.5, "dampening": 0.3, "weight_decay": 0.1}, {"weight_decay": 0.2, "maximize": True}),
    "adamw": ({"betas": (0.5, 0.7), "weight_decay": 0.4, "eps": 1e-3},
              {"betas": (0.9, 0.99), "eps": 1e-3, "amsgrad": True}),
    "adam": ({"betas": (0.5, 0.7), "weight_decay": 0.3, "eps": 1e-3},),
    "lion": ({"betas": (0.6, 0.8), "weight_decay": 0.5}, {"betas": (0.6, 0.8)}),
    "rmsprop": ({"alpha": 0.7, "eps": 1e-3}, {"alpha": 0.7, "eps": 1e-3, "momentum": 0.5}),
    "adagrad": ({"eps": 1e-3},),
}  # fmt: skip


def configuration(rng: Random) -> dict[str, Any]:
    rule = rng.choice(["sgd", "sgd", "adamw", "adamw", "adam", "lion", "rmsprop", "adagrad"])
    foreign = rule in ("rmsprop", "adagrad")
    kind = "fp32" if foreign else rng.choice(["fp32", "fp32", "bf16", "bf16", "fp16", "mixed"])
    settings: dict[str, Any] = {"backend": rng.choice(["cpu", "cpu", "torch", "foreach"])}
    if rng.random() < 0.4:
        settings["max_grad_norm"] = rng.choice([0.5, 3.0, 50.0])
    if rng.random() < 0.4:
        settings["nonfinite"] = rng.choice(["skip", "skip", "raise", "propagate"])
    if kind == "bf16" and rng.random() < 0.6:
        settings["master_weights"] = rng.choice(["fp32", "split16", "split8", None])
    if kind in ("fp16", "mixed") and rng.random() < 0.4:
        settings["master_weights"] = rng.choice(["fp32", None])
    if not foreign and rng.random() < 0.1:
        settings["state_dtype"], settings["state_dtype_min_numel"] = "bf16", 0
    params = []
    for index in range(rng.randint(1, 5)):
        dtype = rng.choice(["fp32", "bf16", "fp16"]) if kind == "mixed" else kind
        layout = rng.choice(LAYOUTS)
        params.append(
            {"shape": rng.choice(SHAPES), "layout": layout, "dtype": dtype, "seed": rng.randrange(1000) + index}
        )
    config = {
        "rule": rule, "options": {"lr": rng.choice([0.05, 0.3]), **rng.choice(OPTIONS[rule])},
        "fuse": rule in ("sgd", "adamw", "adam") and rng.random() < 0.2, "settings": settings, "params": params,
        "cut": rng.randrange(len(params)), "together": None, "threads": 2 if rng.random() < 0.05 else 1,
    }  # fmt: skip
    if rng.random() < 0.12:
        settings.pop("max_grad_norm", None)
        mate = configuration(rng)
        mate["settings"].pop("max_grad_norm", None)
        mate["settings"].pop("nonfinite", None)
        mate["settings"] |= {k: v for k, v in settings.items() if k == "nonfinite"}
        mate["together"] = config["together"] = rng.choice([0.5, 3.0, 50.0])
        config["mate"] = {k: v for k, v in mate.items() if k != "mate"}
    return config


class Calls:
    """Draws the arguments of calls."""

    def __init__(self, rng: Random, config: dict[str, Any]) -> None:
        self.rng, self.config = rng, config
        self.style = rng.choice(["sum", "numbers", "tensors", "mixed", "mixed"])
        # Of all weights; those in the loss are to keep gradients in fp32's range, so there are none then.
        self.far = rng.choice([1e-20, 1e20]) if rng.random() < 0.1 else 1.0

    def rows(self) -> list[int]:
        return [row for row in range(7) if self.rng.random() < 0.7] or [0]

    def seed(self) -> int:
        return self.rng.randrange(10**6)

    def weight(self) -> Any:
        rng = self.rng
        style = (
            rng.choice(["sum", "numbers", "tensors"]) if self.style == "mixed" and rng.random() < 0.2 else self.style
        )
        if style in ("sum", "mixed"):
            return None
        number = rng.choice([0.0, 1.0, 1.0, 2.0, 3.0, 0.3, 7, 129])
        if number == 0 and self.far != 1.0 and style == "tensors":
            number = 1.0  # by the first weight that is not a device's 0 all others are measured
        if rng.random() < 0.04:
            number = rng.choice([-1.0, "nan", "inf"])
        number = number if isinstance(number, str) else number * self.far
        return self.tensor(number) if style == "tensors" else number

    def tensor(self, number: Any) -> Any:
        return ["tensor", number, self.rng.choice(["fp32", "fp32", "fp64", "bf16"]), self.rng.choice([[], [1], [1, 1]])]

    def divisor(self) -> Any:
        rng = self.rng
        if rng.random() < 0.7:
            return None
        number = rng.choice([1.0, 2.0, 5.0, 0.3, 1024.0])
        if rng.random() < 0.1:
            number = rng.choice([0.0, -1.0, "nan", "inf"])
        return self.tensor(number) if rng.random() < 0.5 else number

    def poison(self) -> str | None:
        return self.rng.choice(["inf", "-inf", "nan"]) if self.rng.random() < 0.06 else None

    def draw(self) -> Call:
        rng = self.rng
        name = rng.choices(list(MOVES), list(MOVES.values()))[0]
        name = "micro_batch" if name == "own_backward" and self.far != 1.0 else name
        arguments = self.arguments(name)
        if rng.random() < 0.5:
            arguments["side"] = 1
        if rng.random() < 0.05:
            arguments["default_dtype"] = rng.choice(["bf16", "fp16", "fp64"])
        return name, arguments

    def arguments(self, name: str) -> dict[str, Any]:
        rng = self.rng
        if name == "backward":
            return {"rows": self.rows(), "seed": self.seed(), "poison": self.poison()}
        if name == "accumulate":
            return {"weight": self.weight(), "last": rng.random() < 0.25}
        if name == "micro_batch":
            return {"rows": self.rows(), "seed": self.seed(), "weight": self.weight(), "last": rng.random() < 0.25}
        if name == "own_backward":
            return {
                "rows": self.rows(), "seed": self.seed(), "weight": self.weight(), "last": rng.random() < 0.25,
                "poison": self.poison(), "narrow": rng.random() < 0.3,
            }  # fmt: skip
        if name == "step":
            found = rng.choice([None] * 12 + [0.0, 1.0, 2.0])
            found = None if found is None else self.tensor(found)
            return {"only": rng.random() < 0.2, "normalizer": self.divisor(),
                    "grad_scale": self.divisor() if rng.random() < 0.3 else None,
                    "found_inf": found}  # fmt: skip
        if name == "zero_grad":
            return {"set_to_none": rng.random() < 0.7}
        if name == "setting":
            options = rng.choice([None, {"momentum": rng.choice([0.0, 0.6])}, {"weight_decay": rng.choice([0.0, 0.3])}])
            return {
                "options": options,
                "lr": rng.choice([None, 0.1, 0.02, 0.0]),
                "max_grad_norm": rng.choice(["same", None, 1.0, 20.0]),
            }
        if name == "scaled_step":
            return {"kind": rng.choice(["ours", "stock"]), "unscale": rng.random() < 0.3, "zero": rng.random() < 0.7}
        if name == "clear_by_hand":
            return {"rows": self.rows() if rng.random() < 0.5 else list(range(7)), "to_none": rng.random() < 0.7}
        if name == "clip":
            return {"limit": rng.choice([0.5, 4.0])}
        if name == "assign":
            return {"row": rng.randrange(7), "seed": self.seed(), "kind": rng.choice(ASSIGNED)}
        if name == "hold":
            return {"row": rng.randrange(7)}
        if name == "write_buffers":
            return {"seed": self.seed()}
        if name == "exchange":
            return {"one": rng.randrange(7), "other": rng.randrange(7)}
        if name == "freeze":
            return {"row": rng.randrange(7), "requires_grad": rng.random() < 0.6}
        if name == "write":
            kinds = ["copy", "scale", "zero", "clamp", "element", "nothing", "data"]
            return {"row": rng.randrange(7), "seed": self.seed(), "kind": rng.choice(kinds)}
        if name == "add_group":
            dtype = rng.choice(self.config["params"])["dtype"]
            layout = rng.choice(["contiguous", "transposed"])
            return {"shape": rng.choice(SHAPES), "seed": self.seed(), "dtype": dtype, "layout": layout}
        if name == "relayout":
            return {"row": rng.randrange(7)}
        if name == "load":
            return {"params_first": rng.random() < 0.5}
        if name == "release":
            return {"bucket_bytes": rng.choice([1, 64, 2**20])}
        if name == "resume":
            backend, way = rng.choice(["cpu", "torch", "foreach"]), rng.choice(["shared", "deepcopied", "saved"])
            return {"way": way, "backend": backend, "reload": rng.random() < 0.3}
        if name == "copy":
            return {"way": rng.choice(["deepcopied", "pickled"])}
        return {}


MOVES = {
    "backward": 20, "accumulate": 16, "micro_batch": 10, "own_backward": 7, "step": 14, "zero_grad": 3, "setting": 2,
    "scaled_step": 4, "clear_by_hand": 3, "clip": 2, "assign": 5, "write_buffers": 2, "hold": 2, "exchange": 1,
    "freeze": 2,     "write": 3, "add_group": 1, "release": 1.5, "remove": 1.5, "state_dict": 1, "resume": 3, "copy": 2,
    "full_precision": 1, "relayout": 1.5, "save": 1.5, "load": 2,
}  # fmt: skip
ASSIGNED = (
    "fresh", "fresh", "view", "view", "transposed", "expanded", "graph", "negative", "other", "other", "holes",
    "shared",     "shared", "nan", "fp64", "sparse", "held", "held", "again", "again", "detached",
)  # fmt: skip


@dataclass
class Walk:
    """What is to be done, in full: nothing is drawn while it runs."""

    config: dict[str, Any]
    calls: list[Call]


def drawn(seed: int, length: int) -> Walk:
    rng = Random(seed)
    config = configuration(rng)
    calls = Calls(rng, config)
    return Walk(config, [calls.draw() for _ in range(rng.randint(length // 2, length))])
