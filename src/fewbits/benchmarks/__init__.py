"""Measurements against peers, as ratios in one run: this machine's clock is never compared with another's."""
