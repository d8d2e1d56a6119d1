"""Pages and Markdown for people, made from what studies and diagnoses found."""
