"""A recorded sweep as a target, for tests of the method without hardware."""
