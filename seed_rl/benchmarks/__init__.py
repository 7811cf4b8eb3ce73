"""Speed of each part beside a baseline measured in the same run."""
