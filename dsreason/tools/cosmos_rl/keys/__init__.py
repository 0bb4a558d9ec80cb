"""Tables of all cosmos-rl keys: default, kind of value, and the dsreason keys that it becomes or why it is left out."""
