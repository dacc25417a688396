"""An engine with known truth as a target, and the response surfaces behind it."""
