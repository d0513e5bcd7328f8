"""In: a model or the shape of one. Out: seconds, memory and disk of a whole run, measured, or projected for 405 billion weights."""
