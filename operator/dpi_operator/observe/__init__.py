"""From the cluster and the engines' management ports to plain facts."""
