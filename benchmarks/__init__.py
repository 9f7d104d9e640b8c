"""Speed as ratios, side by side in one run: `python -m benchmarks [NAME ...] [--markdown]`.

Absolute times are those of one machine; each figure therefore stands next to one of the same run that it is compared
with, and next to its target where there is one.
"""
