"""`tokenmill quantize`: calibrates, rounds (GPTQ, AWQ, SmoothQuant), writes and judges a smaller model."""
