"""Results for people. A run's objects come in; results.json (schema.py, filled by results/), the report page (page/) and tables on the
terminal (terminal/) go out."""
