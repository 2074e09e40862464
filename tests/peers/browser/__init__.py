"""Tests of peers in browsers."""
