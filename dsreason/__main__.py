"""`python -m dsreason`, which torchrun and deepspeed start as well."""

from dsreason.cli.main import main

if __name__ == "__main__":
    main()
