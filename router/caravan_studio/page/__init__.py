"""The page that browsers get at `/`: HTML, styles and modules as the browser runs them, without a build step."""
