"""4-bit weights: the NF4 format of QLoRA (arXiv 2305.14314), and linear layers that store their weights in this format."""
