"""The commands of `dyno`, one file each. A command imports the packages that it needs when it runs."""
