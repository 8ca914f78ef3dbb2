// Sets the theme before the first paint. It stands apart from the modules, which load later.
"use strict";

{
  const THEMES = ["auto", "light", "dark"];

  const read = () => {
    try {
      return localStorage.getItem("lookahead.theme");
    } catch {
      return null; // storage is switched off
    }
  };

  const apply = (theme) => {
    document.documentElement.dataset.theme = THEMES.includes(theme) ? theme : "auto";
  };

  apply(read());

  addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const label = () => {
      button.textContent = `Theme: ${document.documentElement.dataset.theme}`;
    };
    button.addEventListener("click", () => {
      const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
      apply(next);
      label();
      try {
        localStorage.setItem("lookahead.theme", next);
      } catch {
        // The theme then lasts as long as the page.
      }
    });
    label();
  });
}
