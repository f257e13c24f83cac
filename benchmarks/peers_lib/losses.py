"""Do two losses of the same training agree?

Where bits differ, because sums are taken in another order, the bound is how far
our own training goes astray from weights that differ by one unit in the last
place: FACTOR times the largest distance seen up to that step, of several such
trainings.
"""
import math
import struct

FACTOR = 8


def float32(value):
    """A loss as it was: programs print it with more or fewer digits."""
    return struct.unpack('<f', struct.pack('<f', value))[0]


def float32_ulp(value):
    """From its float32 to the next."""
    bits = struct.unpack('<i', struct.pack('<f', abs(value)))[0]
    return struct.unpack('<f', struct.pack('<i', bits + 1))[0] - float32(abs(value))


def bounds(ours, nudged):
    """Of each step, how far a loss may be from ours. None is below FACTOR ulp
    of a loss, which is what its own rounding may come to. `nudged`: the losses
    of each training from other weights."""
    largest = 0.0
    limits = []
    for loss, *others in zip(ours, *nudged, strict=True):
        largest = max(largest, float32_ulp(loss), *(
            abs(float32(loss) - float32(other)) for other in others))
        limits.append(FACTOR * largest)
    return limits


class Verdict:
    """`limits`: None where the bits have to be equal."""

    def __init__(self, ours, theirs, limits=None):
        steps = len(ours)
        self.ok = steps > 0 and len(theirs) == steps
        self.ok = self.ok and all(map(math.isfinite, [*ours, *theirs]))
        if not self.ok:
            self.text = f'FAILED: {steps} and {len(theirs)} losses, or not finite'
            return
        distances = [abs(float32(a) - float32(b)) for a, b in zip(ours, theirs)]
        first = next((i for i, d in enumerate(distances) if d), None)
        if first is None:
            self.text = f'equal bits over {steps} steps'
            return
        if limits is None:
            limits = [0.0] * steps
        # 0 of 0 is no part of the bound; something of 0 is beyond it.
        parts = [d / limit if limit else math.inf * d if d else 0.0
                 for d, limit in zip(distances, limits)]
        worst = max(range(steps), key=parts.__getitem__)
        self.ok = parts[worst] <= 1
        self.text = (
            f'{"within" if self.ok else "FAILED: beyond"} bound: equal bits in '
            f'the first {first} of {steps} steps, at most {parts[worst]:.2f} of '
            f'the bound (step {worst}: {distances[worst]:.2g} of {limits[worst]:.2g})')
