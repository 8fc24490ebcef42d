"""Which target rows become rows of the draft head, and at which positions.
 Owns the training side's copy of the rule, on purpose apart from the engine's: the acceptance measured here
is a check of the engine's own, so the two must not share a mistake.
"""

from typing import Literal

import numpy as np

from training.model import IMAGE_PAD, mrope_positions

Policy = Literal["see", "placeholder", "skip", "gap"]


def draft_rows(ids: np.ndarray, policy: Policy) -> tuple[np.ndarray, np.ndarray]:
    """The draft's rows for a target's input ids: index of each row's input [n], positions [3, n].
     A row with input `x[i]` carries the target's hidden state of row `i - 1`. `see` and `placeholder` keep
    every input after the first and number it as the target does; `skip` leaves image inputs out and numbers
    the rest without holes; `gap` leaves them out and keeps the target's numbers.
    """
    inputs = np.arange(1, len(ids))
    positions = mrope_positions(ids)[:, 1:]
    if policy in ("skip", "gap"):
        kept = np.asarray(ids)[1:] != IMAGE_PAD
        inputs, positions = inputs[kept], positions[:, kept]
    if policy == "skip":
        positions = np.broadcast_to(np.arange(len(inputs)), (3, len(inputs)))
    return inputs, positions
