"""The running operator: watches, workers, the lease. Decisions are the planner's."""
