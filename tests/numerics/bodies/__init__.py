"""What each worker executes: functions ``body(ctx, **arguments)``, named by the tests and run on every rank."""
