"""The subcommands of `dsreason`, one file each."""
