"""Text for calibration: paths come in, samples of tokens go out. records.py and documents.py read files, samples.py draws from them,
windows.py cuts text into windows, split.py keeps some for evaluation, coverage.py and overlap.py compare the two."""
