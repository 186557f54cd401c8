"""Commands of `barnraise hub` and `barnraise join --invite`: host, join, mirror and inspect hubs."""
