"""What a run has at hand, and what a row gives."""
import dataclasses

import ratios
import rows


@dataclasses.dataclass
class Bench:
    """What a run has at hand. `folder` is for its files, and goes with it."""
    train: str
    optimizers: str
    collectives: str
    checkpoint: str
    data: str
    peers: dict  # variables of the peers' environment
    folder: str
    rounds: int
    small: bool
    loss_steps: int | None  # at most
    disk: str | None  # a folder there, for checkpoints; `folder` without


@dataclasses.dataclass
class Line:
    """One ratio, and the milliseconds (or MB) of both."""
    goal: rows.Goal
    ratio: ratios.Ratio
    ours: list
    theirs: list


@dataclasses.dataclass
class Result:
    row: rows.Row
    lines: list = dataclasses.field(default_factory=list)
    notes: list = dataclasses.field(default_factory=list)
    raw: dict = dataclasses.field(default_factory=dict)
    failed: bool = False  # its losses are wrong

    @property
    def met(self):
        return not self.failed and all(line.ratio.met for line in self.lines)
