"""How far the forecast of a plan's KL can be trusted. A model and its statistics or an artifact in, measured beside predicted KL out.

side_by_side.py   the float model and changed copies of it, run block by block     probes.py        single weights, measured directly
measurement.py    `fewbits measure`: the table, corrected by probes                accumulation.py  KL by block, for an artifact
block_errors.py   what accumulation.py returns                                     correction.py    the table, corrected by damaged copies
large_damage.py   where KL is no sum of small ones any more                        by_kind.py       other text than that of calibration
"""
