"""The commands of `dyno`, one file each; bodies import what they need when they run."""
