"""From values to bytes and back. A weight and its scales come in, packed parts go out.

codes.py       values to codes and back
bitfields.py   fields of a block as bytes
bitstream.py   fields of a row as one stream of bits
"""
