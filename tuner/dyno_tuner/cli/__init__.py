"""The command `tune`: its subcommands, options and arguments."""
