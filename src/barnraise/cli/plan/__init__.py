"""Commands that predict step times: `barnraise plan` and the output of a dry run."""
