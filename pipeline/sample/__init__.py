"""A small real mixture-of-experts language model and the routing it recorded: the bundled sample.

`corpus.py` takes text from Python's own standard library, `model.py` is the network and its checkpoint, `train.py`
trains it and writes everything else in this folder. The two `*.route.csv.gz` dumps, each with its `.toml` beside it,
are ordinary raw dumps: the pipeline ingests them as it would those of any engine. Only `train.py` and `model.py`
need torch.

The model has about 5 million parameters and read 2.5 million bytes: its routing is real, but too small a sample to
compare cache policies with. Its greedy text repeats phrases, and a third of the bytes of the `code` dump equal the one
before them (indentation), so reuse from token to token is higher there than in a large model with a word vocabulary.
"""
