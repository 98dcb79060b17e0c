"""Parts of scripts/corpus.py: collects, makes, compares and times ONNX files."""
