"""`dsreason plan`: what a run needs of GPUs, hosts and disks, from only its configuration and the shape of its model."""
