"""Bits on disk: fields of a block, streams of a row, and the block structures that formats are made of."""
