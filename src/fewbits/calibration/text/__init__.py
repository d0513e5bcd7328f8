"""Text for calibration: paths come in, samples of tokens go out. records.py and documents.py read files, domains.py tells kinds of text
apart, samples.py draws from them, windows.py cuts text into windows, coverage.py and overlap.py compare what is calibrated and judged."""
