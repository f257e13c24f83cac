"""Ratios of paired measurements, and the interval of their median."""
import math
import statistics

COVERAGE = 0.95


def median_interval(values):
    """(low, high): the order statistics that hold the median of what the values
    are drawn from, each by itself, with a probability of COVERAGE at least,
    whatever the distribution. Infinite for fewer than six values."""
    ordered = sorted(values)
    n = len(ordered)
    tail = 0.0  # probability that at most k of n lie below the median
    k = -1
    while True:
        tail += math.comb(n, k + 1) / 2 ** n
        if 2 * tail > 1 - COVERAGE:
            break
        k += 1
    if k < 0:
        return -math.inf, math.inf
    return ordered[k], ordered[n - 1 - k]


def of_turns(numerator, denominator):
    """Round by round, the ratio of the medians of two turns."""
    return [statistics.median(a) / statistics.median(b)
            for a, b in zip(numerator, denominator)]


class Ratio:
    """Against a goal, at_least or at_most, that holds of the whole interval;
    with neither it is information."""

    def __init__(self, values, at_least=None, at_most=None):
        self.set(values, *median_interval(values), at_least, at_most)

    def set(self, values, low, high, at_least, at_most):
        self.median = statistics.median(values)
        self.low, self.high = low, high
        self.at_least, self.at_most = at_least, at_most

    @property
    def has_goal(self):
        return self.at_least is not None or self.at_most is not None

    @property
    def met(self):
        if self.at_least is not None:
            return self.low >= self.at_least
        return self.at_most is None or self.high <= self.at_most

    @property
    def goal(self):
        if not self.has_goal:
            return ''
        return (f'>= {self.at_least}' if self.at_least is not None
                else f'<= {self.at_most}')

    @property
    def verdict(self):
        if not self.has_goal:
            return ''
        return 'met' if self.met else 'NOT MET'


class Spread(Ratio):
    """Of few values that hardly change: the interval holds all of them."""

    def __init__(self, values, at_least=None, at_most=None):
        self.set(values, min(values), max(values), at_least, at_most)
