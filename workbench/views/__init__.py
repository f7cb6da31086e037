"""Figures, widgets and the HTML report. Views draw what analysis computed and compute nothing."""
