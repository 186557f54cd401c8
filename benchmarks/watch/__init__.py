"""Cost of the screen of `barnraise watch`, on a real run."""
