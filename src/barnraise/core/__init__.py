"""Foundation: errors with codes and hints, settings, units, metrics. Imports nothing else of Barnraise."""
