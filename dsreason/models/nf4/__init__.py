"""4-bit weights: the NF4 codes and block scales of QLoRA (arXiv 2305.14314), and linear layers that store them."""
