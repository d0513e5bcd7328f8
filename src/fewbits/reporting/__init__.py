"""Results for people: tables on the terminal now, the report page later. Reads values, computes nothing."""
