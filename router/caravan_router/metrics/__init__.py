"""What the router counts and measures, under TGI's names where TGI has the metric."""
