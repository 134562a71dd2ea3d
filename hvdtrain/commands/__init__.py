"""The subcommands of `hvdtrain`: arguments in, printing out."""
