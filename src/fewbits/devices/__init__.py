"""Hardware: which devices there are, what this machine is, and which instruction sets its processor has.

catalogue   devices.csv as `Device` values: memory, bandwidth, rates. In: a device's name or a size such as `8GB`
host        this machine as a `Device`: free memory and speeds measured in a moment
processor   the native module `fewbits._native` and the instruction set that it runs with
units       sizes as people write them -> bytes
"""
