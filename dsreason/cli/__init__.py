"""The subcommands of `dsreason`, a file each."""
