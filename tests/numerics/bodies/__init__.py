"""What each worker executes: functions ``body(ctx, **arguments)``, named by the tests, run on every rank."""
