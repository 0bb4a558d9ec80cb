"""`dsreason plan`: what a run would need of GPUs, hosts and disks, from its configuration and the shape of its model alone."""
