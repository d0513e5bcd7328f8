"""In: formats, shapes and threads. Out: seconds of ours and of other libraries, timed in turn, and their share of the limits."""
